use std::collections::BTreeSet;

use tracing::{info, warn};

use super::watch::Failure;

/// The conditions of an API server. The agent logs a condition when it begins, not at each failed attempt.
#[derive(Debug, Default)]
pub(super) struct ServerConditions {
    away: bool,
    refused: BTreeSet<String>,
}

impl ServerConditions {
    /// Logs new conditions of the server. Returns all current conditions, including `objects`, the conditions of
    /// objects, which this function does not log.
    pub(super) fn update<'a>(
        &mut self,
        failures: impl Iterator<Item = &'a Failure>,
        objects: impl Iterator<Item = &'a str>,
    ) -> Vec<String> {
        let (mut away, mut refused) = (None, BTreeSet::new());
        for failure in failures {
            match failure {
                // All kinds come from the same API server, so one line reports that it does not answer.
                Failure::Away(why) => away = away.or(Some(away_text(why))),
                Failure::Refused(why) => _ = refused.insert(refused_text(why)),
            }
        }
        match &away {
            Some(away) if !self.away => warn!("{away}"),
            None if self.away => info!("the API server answers again"),
            Some(_) | None => {}
        }
        refused.difference(&self.refused).for_each(|refused| warn!("{refused}"));
        self.away = away.is_some();
        let now = away.into_iter().chain(refused.iter().cloned()).chain(objects.map(ToOwned::to_owned));
        let now = now.collect();
        self.refused = refused;
        now
    }
}

fn away_text(why: &str) -> String {
    format!("cannot ask the API server for {why}; the last known state stays in force, and the agent retries")
}

fn refused_text(why: &str) -> String {
    format!(
        "the API server refuses {why}; the last known state stays in force, and the agent retries: check that the agent's user \
         may list and watch them"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreachable_server_is_one_condition_and_refusals_are_listed_by_kind() {
        let mut server = ServerConditions::default();
        let away = |kind: &str| Failure::Away(format!("{kind}: refused"));
        let told = server.update([away("Services"), away("Nodes")].iter(), ["bad"].into_iter());
        assert_eq!(told.len(), 2);
        assert!(told[0].contains("Services") && told[1] == "bad", "{told:?}");
        let forbidden = Failure::Refused("Nodes: forbidden".to_owned());
        let told = server.update([away("Services"), forbidden].iter(), [].into_iter());
        assert_eq!(told.len(), 2);
        assert!(told[1].contains("Nodes: forbidden"), "{told:?}");
        assert!(server.update([].into_iter(), [].into_iter()).is_empty());
    }
}
