"""One constrained beam step, three times with one signature."""
