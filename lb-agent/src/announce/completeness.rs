//! Which part of the objects the agent knows: until the agent knows all objects, announcements of an earlier agent
//! stay.

/// Which part of the objects the agent has read and written to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Completeness {
    /// Not all objects yet.
    #[default]
    Partial,
    /// All objects that can be read. Announcements of an earlier agent that only unreadable objects may need stay.
    Readable,
    /// All objects: the agent removes every announcement of an earlier agent that no object needs.
    Whole,
}
