"""``evener dashboard``: runs in the browser, during and after training."""
