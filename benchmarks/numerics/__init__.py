"""What half and low precision cost in digits: errors, trainings."""
