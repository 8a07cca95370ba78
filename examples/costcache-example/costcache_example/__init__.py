"""An example of a third-party plugin for costcache."""
