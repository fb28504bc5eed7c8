"""Models as free functions over array trees."""
