"""The simulator: recorded programs replayed through the library's own cache, with a virtual clock and placeholders."""
