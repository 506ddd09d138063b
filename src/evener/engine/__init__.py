"""A window as one rank runs it: what the protocol decides is carried out here."""
