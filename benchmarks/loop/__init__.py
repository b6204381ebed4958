"""What a thousand agent loops on one core cost."""
