"""Data sets: images, all with one face (`pipeline.ImageData`), and text."""
