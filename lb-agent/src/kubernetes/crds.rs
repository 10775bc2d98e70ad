//! Reports that the API server has some CRDs of MetalLB but lacks others. An agent that starts in this state announces
//! nothing by the protocol (layer 2 or BGP) that needs a missing CRD, and its watches report no error.
//!
//! If the API server has no CRD of MetalLB, nothing is wrong: users may install the CRDs at any time.

use tokio::time::Instant;
use tracing::warn;

use super::{
    metallb::MetalLb,
    watch::{Presence, Watch},
};

/// A CRD, and whether the API server has it.
#[derive(Clone, Debug)]
pub(super) struct Crd {
    /// The full name, such as `bgppeers.metallb.io`.
    name: String,
    version: &'static str,
    presence: Presence,
}

impl Crd {
    pub(super) fn of<K: MetalLb>(watch: &Watch<K>) -> Self {
        let name = format!("{}.metallb.io", K::PLURAL);
        Self { name, version: K::VERSION, presence: watch.presence() }
    }

    /// Since when the API server is known to have the CRD; `None` if the CRD is missing, or no answer has shown it.
    const fn exists_since(&self) -> Option<Instant> {
        if let Presence::Exists(since) = self.presence { Some(since) } else { None }
    }
}

/// The condition that some CRDs are missing. It is logged when it begins or changes.
#[derive(Debug)]
pub(super) struct MissingCrds {
    /// The consequence of a missing CRD, as a part of the condition's sentence.
    effect: &'static str,
    logged: Option<String>,
}

impl MissingCrds {
    pub(super) const fn new(effect: &'static str) -> Self {
        Self { effect, logged: None }
    }

    /// The condition as a sentence for `lb-agent status`; `None` if the API server has all of these CRDs, or none.
    pub(super) fn update(&mut self, crds: &[Crd]) -> Option<String> {
        let now = sentence(crds, self.effect);
        if let Some(why) = now.as_ref().filter(|_| now != self.logged) {
            warn!("{why}");
        }
        self.logged.clone_from(&now);
        now
    }
}

fn sentence(crds: &[Crd], effect: &str) -> Option<String> {
    let first = crds.iter().filter_map(Crd::exists_since).min()?;
    // CRDs are created one after the other. So a CRD that was missing before the first one existed may exist by now.
    let is_missing = |crd: &&Crd| matches!(crd.presence, Presence::Missing(at) if at > first);
    let name = |crd: &Crd| format!("{} ({})", crd.name, crd.version);
    let missing: Vec<String> = crds.iter().filter(is_missing).map(name).collect();
    let present: Vec<&str> =
        crds.iter().filter(|crd| crd.exists_since().is_some()).map(|crd| crd.name.as_str()).collect();
    (!missing.is_empty()).then(|| {
        format!(
            "the API server lacks the CRD {} but has {}: {effect}; install all CRDs of one release of MetalLB, also those \
             without objects",
            missing.join(", "),
            present.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A CRD: if `exists`, it has existed since this second, else it was missing at this second.
    fn crd(name: &str, second: u64, exists: bool) -> Crd {
        let at = *START + Duration::from_secs(second);
        let presence = if exists { Presence::Exists(at) } else { Presence::Missing(at) };
        Crd { name: name.to_owned(), version: "v1", presence }
    }

    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);

    #[test]
    fn only_some_missing_crds_are_a_condition() {
        let mut condition = MissingCrds::new("nothing works");
        let unknown = Crd { presence: Presence::Unknown, ..crd("b", 0, false) };
        for crds in [
            vec![crd("a", 1, false), crd("b", 2, false)],
            vec![crd("a", 1, true), crd("b", 2, true)],
            vec![crd("a", 1, true), unknown],
            vec![crd("a", 2, true), crd("b", 1, false)],
        ] {
            assert_eq!(condition.update(&crds), None, "{crds:?}");
        }
        let text = condition.update(&[crd("a", 1, true), crd("b", 2, false), crd("c", 3, true)]).unwrap();
        assert!(
            text.starts_with("the API server lacks the CRD b (v1) but has a, c: nothing works; "),
            "{text}"
        );
    }
}
