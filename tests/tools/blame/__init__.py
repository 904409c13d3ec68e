"""`mpx.blame`: faults that are planted, and what is named."""
