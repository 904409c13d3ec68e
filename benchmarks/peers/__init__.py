"""The libraries beside mpx: their environment and their arms."""
