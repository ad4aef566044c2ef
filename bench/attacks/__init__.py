"""Attacks on running services, beside a victim that sends ordinary requests."""
