"""Retention by tenant and session: a third-party plugin for costcache."""
