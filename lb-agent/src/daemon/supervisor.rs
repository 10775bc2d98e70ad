//! Reports to the supervisor that started the agent, such as systemd, by sd_notify(3): that the agent is ready, is
//! alive, or stops. Without `NOTIFY_SOCKET` in the environment the agent reports nothing.

use std::{convert::Infallible, env, future, slice, sync::Arc, time::Duration};

use sd_notify::NotifyState;
use tokio::time::{self, MissedTickBehavior};
use tracing::warn;

use super::{state::State, tasks::Tasks};

/// Interval between two checks of the health of an agent that is not ready yet.
const LOOK: Duration = Duration::from_millis(100);

/// Spawns the task that reports that the agent is ready and alive, if there is a supervisor.
pub(super) fn spawn(state: Arc<State>, tasks: &mut Tasks) {
    if env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let is_healthy = move || state.health().healthy;
    tasks.spawn("supervisor", follow(is_healthy, sd_notify::watchdog_enabled(), notify));
}

/// Reports to the supervisor that the agent stops.
pub(super) fn stopping() {
    notify(NotifyState::Stopping);
}

fn notify(state: NotifyState<'static>) {
    if let Err(error) = sd_notify::notify(slice::from_ref(&state)) {
        warn!("cannot send {state} to the supervisor at $NOTIFY_SOCKET: {error}");
    }
}

/// Sends READY when the agent is healthy for the first time. Then sends two heartbeats within each `watchdog`, but none
/// while the agent is unhealthy, so that the supervisor restarts it.
async fn follow(
    is_healthy: impl Fn() -> bool,
    watchdog: Option<Duration>,
    send: impl Fn(NotifyState<'static>),
) -> anyhow::Result<Infallible> {
    while !is_healthy() {
        time::sleep(LOOK).await;
    }
    send(NotifyState::Ready);
    let Some(period) = watchdog.map(|limit| limit / 2).filter(|period| !period.is_zero()) else {
        return future::pending().await;
    };
    let mut heartbeat = time::interval(period);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        heartbeat.tick().await;
        if is_healthy() {
            send(NotifyState::Watchdog);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    };

    use super::*;

    /// The messages that [`follow`] sends until `during` is over, given this health and this watchdog interval.
    async fn sent(healthy: &AtomicBool, watchdog: Option<Duration>, during: impl Future) -> Vec<String> {
        let sent = Mutex::new(Vec::new());
        let follow = follow(
            || healthy.load(Ordering::Relaxed),
            watchdog,
            |state| sent.lock().unwrap().push(state.to_string()),
        );
        tokio::select! {
            _never = follow => unreachable!(),
            _ = during => {}
        }
        sent.into_inner().unwrap()
    }

    #[tokio::test]
    async fn unhealthy_agent_is_not_ready() {
        let limit = Some(Duration::from_millis(2));
        assert_eq!(sent(&AtomicBool::new(false), limit, time::sleep(LOOK * 3)).await, [""; 0]);
    }

    #[tokio::test]
    async fn agent_is_ready_once_it_is_healthy() {
        let healthy = AtomicBool::new(false);
        let becomes_healthy = async {
            time::sleep(LOOK / 2).await;
            healthy.store(true, Ordering::Relaxed);
            time::sleep(LOOK * 5).await;
        };
        assert_eq!(sent(&healthy, None, becomes_healthy).await, ["READY=1"]);
    }

    #[tokio::test]
    async fn heartbeats_end_while_the_agent_is_unhealthy() {
        let (healthy, period) = (AtomicBool::new(true), Duration::from_millis(20));
        let becomes_unhealthy = async {
            time::sleep(period * 10).await;
            healthy.store(false, Ordering::Relaxed);
        };
        let messages = sent(&healthy, Some(period * 2), becomes_unhealthy).await;
        assert_eq!(messages[0], "READY=1");
        assert!(messages.len() > 2 && messages[1..].iter().all(|it| it == "WATCHDOG=1"), "{messages:?}");

        // The agent is healthy at the first check, and unhealthy at all later checks.
        let looks = Mutex::new(0);
        let is_healthy_once = || {
            let mut looks = looks.lock().unwrap();
            *looks += 1;
            *looks == 1
        };
        let after = Mutex::new(Vec::new());
        let follow =
            follow(is_healthy_once, Some(period * 2), |state| after.lock().unwrap().push(state.to_string()));
        assert!(time::timeout(period * 10, follow).await.is_err());
        assert_eq!(after.into_inner().unwrap(), ["READY=1"]);
        assert!(*looks.lock().unwrap() > 2);
    }
}
