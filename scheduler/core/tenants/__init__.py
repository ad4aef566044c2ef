"""A tenant: the terms that the operator grants it, and its account."""
