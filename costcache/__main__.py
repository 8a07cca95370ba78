"""``python -m costcache``."""

from __future__ import annotations

from costcache.cli import main

if __name__ == "__main__":
    main()
