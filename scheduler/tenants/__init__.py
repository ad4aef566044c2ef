"""What the operator grants each tenant: the file of tenants, and limits of requests and tokens a minute."""
