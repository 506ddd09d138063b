"""``evener doctor``: facts about this machine, another one and the link, and problems in them."""
