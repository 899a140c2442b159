"""What several tests share: random programs, on values and on arrays, and strategies that make them."""
