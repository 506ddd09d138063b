"""``evener dashboard``: runs in the browser, while they go on and after."""
