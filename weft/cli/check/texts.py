"""A page of texts to check models with: prose, code, numbers, other scripts, repetition."""

from __future__ import annotations

TEXTS = (
    "The harbour was quiet before dawn. Two fishermen mended a net under a single lamp, and neither of them spoke "
    "until the first gulls came over the wall. Then the older one folded his knife, looked at the sky, and said that "
    "the wind would turn by noon. They loaded the boat without hurry: six crates, a coil of rope, bread, and water.",
    "def median(values: list[float]) -> float:\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
    "    if len(ordered) % 2:\n        return ordered[middle]\n    return (ordered[middle - 1] + ordered[middle]) / 2\n"
    "\n\nassert median([3, 1, 2]) == 2\nassert median([4, 1, 3, 2]) == 2.5\n",
    "Ein Zug verlässt Hamburg um 8.14 Uhr und erreicht Köln um 12.09 Uhr. La bibliothèque ouvre à neuf heures, sauf le "
    "lundi. El tren de las siete llega siempre tarde. Поезд прибыл вовремя. 電車は七時に出発します。",
    '{"order": 10482, "items": [{"name": "lamp", "price": 24.5, "count": 2}, {"name": "cable", "price": 3.99, '
    '"count": 10}], "total": 88.9, "paid": true, "address": {"street": "Mill Lane 7", "city": "Leeds", "zip": null}}',
    "one two three four five six seven eight nine ten, one two three four five six seven eight nine ten, one two three "
    "four five six seven eight nine ten, one two three four five six seven eight nine ten, one two three four",
    "The heat that a wire gives off grows with the square of the current. If 2 A warm it by 6 W, then 4 A warm it by "
    "24 W, and 6 A by 54 W. So doubling a current is not twice as bad but four times, and a fuse must melt in time.",
)
