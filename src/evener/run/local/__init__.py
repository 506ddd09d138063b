"""Windows of policies CADENCE and ASYNC: local steps, and the exchange that averages them."""
