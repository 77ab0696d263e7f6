"""Statistics of gradients, and when and how tables are refitted to them."""
