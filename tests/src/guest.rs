//! Tests that change the machine or need a kernel of `cargo xtask vm`: only guests run them.
//!
//! They are marked ``#[ignore = "only in a guest: `cargo xtask vm` runs it"]``, and begin with [`only`], so that `cargo
//! test -- --ignored` does no harm on other machines.

/// Panics on an ordinary machine, so that the test cannot change it. `cargo xtask vm` sets `$LB_TEST_GUEST` in its
/// guests.
///
/// # Panics
/// Outside of a guest.
pub fn only() {
    let is_guest = std::env::var_os("LB_TEST_GUEST").is_some();
    assert!(
        is_guest,
        "this test changes the machine it runs on: `cargo xtask vm --test NAME` runs it in a guest"
    );
}
