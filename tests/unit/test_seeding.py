"""Seeds are stable across machines and versions: the literals below were computed with `sha256sum`."""

from itertools import product

from offline_grpo.seeding import derive_seed


def test_seed_is_the_first_eight_bytes_of_sha256_without_the_sign_bit() -> None:
    # printf '4242:0:5000:0' | sha256sum
    assert derive_seed(4242, 0, 5000, 0) == 0x683D3AC829E32256
    # printf 'a' | sha256sum = ca978112ca1bbdca...; its first bit is set and dropped
    assert derive_seed("a") == 0x4A978112CA1BBDCA


def test_every_part_matters() -> None:
    seeds = {derive_seed(*parts) for parts in product(range(3), range(3), "abc", range(3))}
    assert len(seeds) == 81
