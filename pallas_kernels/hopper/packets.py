"""Instructions for packets, which a block of a cluster sends into the shared memory of another.

A barrier of the receiving block counts the bytes that arrive. The receiver says how many will come.
Packets may come before that: a phase ends only after the receiver has arrived, too.
"""

EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
WAIT = """{
.reg .pred done;
AGAIN:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1;
@!done bra AGAIN;
}"""
PREPARE = "mbarrier.init.shared::cta.b64 [$0], 1;"
# After barriers have been prepared, and before any block sends.
MEET = (
    "fence.mbarrier_init.release.cluster;",
    "barrier.cluster.arrive.release.aligned;",
    "barrier.cluster.wait.acquire.aligned;",
)
MAP = "mapa.shared::cluster.u32 $0, $1, $2;"  # the address in another block
