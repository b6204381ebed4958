"""The cost of a thousand concurrent agent loops on one core."""
