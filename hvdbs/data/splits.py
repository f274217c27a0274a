"""Images that are trained on and scored as well: the same file in both splits, or a copy of it."""

from __future__ import annotations

import os
from itertools import chain

import numpy as np

from hvdbs.data.folder import Listing, shown
from hvdbs.errors import refusal

_LOOKED_AT = 32  # pairs whose bytes are compared while a folder is listed; ``python -m hvdbs.data check`` reads all


def refuse_same_files(root: str, classes: dict[str, list[bytes]], listed: dict[str, Listing]) -> None:
    """Raises HvdbsError for a file that is in val and train: by a link of either kind, or a linked folder.

    By inodes, which the listing knows already; the few that are in both are looked at again.
    """
    inodes = {split: np.concatenate(listed[split].inodes) for split in ("train", "val")}
    both = np.intersect1d(inodes["train"], inodes["val"])
    if not len(both):
        return
    paths = {split: _paths(root, split, classes[split], listed[split]) for split in ("train", "val")}
    for inode in both.tolist():
        train, val = (paths[split][int(np.flatnonzero(inodes[split] == inode)[0])] for split in ("train", "val"))
        if os.path.samefile(train, val):  # else they are on two file systems
            more = f" (and {len(both) - 1} more)" if len(both) > 1 else ""
            rule = f"is the same file as {shown(train)}"
            raise refusal(
                "data",
                shown(val) + more,
                rule,
                "its score says nothing if it is trained on: take it out of one of them",
            )


def copies(root: str, classes: dict[str, list[bytes]], listed: dict[str, Listing]) -> str:
    """What to say of images of val that are copies of train's; empty if there seem to be none.

    Files of the same name and size may be copies, whatever their class; of those, a few spread over all are compared.
    """
    names = {split: zip(chain(*listed[split].names), chain(*listed[split].sizes), strict=True) for split in listed}
    of_val = {key: number for number, key in enumerate(names["val"])}
    alike = [(number, of_val[key]) for number, key in enumerate(names["train"]) if key in of_val]
    if not alike:
        return ""
    paths = {split: _paths(root, split, classes[split], listed[split]) for split in listed}
    some = alike[:: -(-len(alike) // _LOOKED_AT)]
    same = [(paths["train"][t], paths["val"][v]) for t, v in some if _same_bytes(paths["train"][t], paths["val"][v])]
    if not same:
        return ""
    train, val = same[0]
    return (
        f"{len(same)} of {len(some)} images that were looked at are in train and in val, such as {shown(train)} and "
        f"{shown(val)}: scores on them say nothing; python -m hvdbs.data check {shown(root)} finds all"
    )


def _paths(root: str, split: str, classes: list[bytes], listing: Listing) -> list[bytes]:
    place = os.path.join(os.fsencode(root), split.encode())
    return [
        b"/".join((place, name, file)) for name, files in zip(classes, listing.names, strict=True) for file in files
    ]


def _same_bytes(one: bytes, other: bytes) -> bool:
    try:
        with open(one, "rb") as first, open(other, "rb") as second:
            return first.read() == second.read()
    except OSError:  # whoever reads them says so
        return False
