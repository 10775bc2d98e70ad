//! Values that the writer changes and other tasks read.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

/// A value of which every reader sees each change at once. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Published<T>(Arc<RwLock<T>>);

impl<T> Published<T> {
    /// The present value. The writer waits until the guard is dropped.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value once no reader holds a guard.
    pub(super) fn change(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner));
    }
}
