"""What ``evener doctor`` finds: facts about this machine, another one and the link between them."""
