//! How much of the objects the agent knows: until it knows all, announcements of an earlier agent stay.

/// Which part of the objects the agent has read and written to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Completeness {
    /// Not all objects yet.
    #[default]
    Partial,
    /// All objects that can be read. What only other objects ask for stays as an earlier agent left it.
    Readable,
    /// All objects, so that nothing of an earlier agent is left.
    Whole,
}
