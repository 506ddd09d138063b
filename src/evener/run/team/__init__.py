"""Who a rank is, where it computes, how it reaches the others, and how they meet."""
