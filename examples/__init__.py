"""Examples of mpx: complete training programs, each readable in one sitting."""
