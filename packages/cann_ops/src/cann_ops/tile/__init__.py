"""Programs in TileLang's Ascend dialect, one file a kernel. Importing this package needs no tilelang; programs do."""
