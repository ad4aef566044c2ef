"""The settings of tenants: their file, and the limits of requests and tokens a minute."""
