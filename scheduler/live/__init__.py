"""The live page: block pool, block tables and batch as they change, in a browser, and a prompt box beside them.

engine ── snapshot ──► LiveFeed ── one encoding ──► every viewer's event stream ──► static/*.js draws
  └──── plan log ────────┘
"""
