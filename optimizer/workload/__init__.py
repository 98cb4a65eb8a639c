"""Models and what it takes to train them."""
