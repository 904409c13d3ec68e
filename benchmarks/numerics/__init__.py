"""What half and low precision cost in digits: errors, folds, trainings."""
