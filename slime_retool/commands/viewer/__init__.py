"""`slime-retool view`: a run's samples as text in a terminal, or as one page that opens from disk.

    command.py   the command line
    reading.py   files of a run -> `DumpedSample`s, one at a time
    columns.py   a sample -> one row of the table, and what looks suspicious about it
    pieces.py    rows, texts and tokens -> .js files that the page loads when it needs them
    page.py      the whole page: pieces of each run, metrics, and the assets
    text.py      samples as text
    assets/      the page itself: HTML, style, script
"""
