"""The Ascend 950 that programs are written for: 32 blocks of one cube and two vector cores.

The count is that of the Ascend950DT_9581 and the Ascend950PR_958b; other parts have other counts. A program takes any
number of rows on any number of cores, so a part with fewer runs several blocks on a core.
"""

CUBE_CORES = 32
VECTOR_CORES = 2 * CUBE_CORES
