//! Busy loops that run beside a task, so that the task runs as on an overloaded machine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Runs `task` while one thread for each CPU spins without a pause.
///
/// # Errors
///
/// `task` fails, or the number of CPUs is unknown.
pub(crate) fn beside_busy_loops(task: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let cpus = thread::available_parallelism()?.get();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..cpus {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        eprintln!("beside {cpus} busy loops");
        let result = task();
        stop.store(true, Ordering::Relaxed);
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_the_task_ends_the_loops() {
        assert!(beside_busy_loops(|| anyhow::bail!("a test failed")).is_err());
    }
}
