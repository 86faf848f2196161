"""Query -> prompt -> constrained beam search -> items."""
