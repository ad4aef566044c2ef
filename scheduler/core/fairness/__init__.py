"""Fair shares of the batch among tenants, by Virtual Token Counters (Sheng et al., OSDI 2024)."""
