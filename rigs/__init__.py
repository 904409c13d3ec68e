"""Programs that measure mpx on many programs, for pages of the documentation."""
