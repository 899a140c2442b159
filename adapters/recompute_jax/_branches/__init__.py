"""Conditionals that hand values to each other, as those of a loss and its gradient: what they keep, what runs again."""
