"""Names of other libraries over Octavo's rooms, for code that was written for them."""
