"""Identities: which caller makes a call, for which tenant, and which calls its roles allow."""
