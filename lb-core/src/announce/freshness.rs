//! Distinguishes a new request from a duplicate of an earlier one, which an attacker without the key may have recorded.
//!
//! A request has a random number that its sender chose at its start (its *incarnation*), and a number that grows with
//! each request since then. A receiver accepts a request of the incarnation that it knows if the request's number is
//! greater than those of all earlier requests. It accepts another incarnation only if the request echoes the receiver's
//! *challenge*. The receiver gives the challenge in an answer, and replaces it as soon as a request has echoed it. So
//! the receiver accepts no request from before its own start, and none of an incarnation that it has since replaced by
//! another.

use serde::{Deserialize, Serialize};

/// Identifies a request among all requests that a member has ever sent, including those before its last start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestId {
    /// A random number that the member chose at its start.
    pub incarnation: u64,
    /// A number that grows with each request since the start.
    pub number: u64,
}

/// A number that a member must echo before another member accepts requests of its incarnation.
pub type Challenge = u64;

/// Generates challenges, none of them twice.
#[derive(Clone, Debug)]
pub(super) struct Challenges(Challenge);

impl Challenges {
    /// A generator for a member with this incarnation. It gives consecutive numbers, which almost certainly differ from
    /// those of other incarnations. They need not be secret, because only a member can sign an echo.
    pub(super) const fn new(incarnation: u64) -> Self {
        Self(incarnation)
    }

    pub(super) const fn give(&mut self) -> Challenge {
        self.0 = self.0.wrapping_add(1);
        self.0
    }
}

/// The state by which a member recognises duplicates of the requests of one other member.
#[derive(Clone, Copy, Debug)]
pub(super) struct Freshness {
    /// The last request that this member accepted.
    last: Option<RequestId>,
    /// The challenge that the next incarnation of the other member must echo.
    pub(super) challenge: Challenge,
}

/// Whether a request is new, or a duplicate of an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Novelty {
    /// The request is new.
    New,
    /// The request is a duplicate, or a later request has overtaken it.
    Old,
    /// The request is from an unknown incarnation, whose member must echo the challenge first.
    Unknown,
}

impl Freshness {
    pub(super) const fn new(challenges: &mut Challenges) -> Self {
        Self { last: None, challenge: challenges.give() }
    }

    /// Decides whether a request is new; a new request becomes the last accepted request.
    pub(super) fn judge(
        &mut self,
        id: RequestId,
        echo: Option<Challenge>,
        challenges: &mut Challenges,
    ) -> Novelty {
        match self.last {
            Some(last) if last.incarnation == id.incarnation => {
                if id.number <= last.number {
                    return Novelty::Old;
                }
            }
            Some(_) | None if echo == Some(self.challenge) => self.challenge = challenges.give(),
            Some(_) | None => return Novelty::Unknown,
        }
        self.last = Some(id);
        Novelty::New
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicates_of_requests_are_ignored() {
        let mut challenges = Challenges::new(77);
        let mut known = Freshness::new(&mut challenges);
        let mut judge = |incarnation, number, echo| {
            let verdict = known.judge(RequestId { incarnation, number }, echo, &mut challenges);
            (verdict, known.challenge)
        };
        let (verdict, first) = judge(1, 1, None);
        assert_eq!(verdict, Novelty::Unknown);
        let (verdict, second) = judge(1, 2, Some(first));
        assert_eq!(verdict, Novelty::New);
        for (incarnation, number, echo, expected) in [
            (1, 2, Some(first), Novelty::Old),
            (1, 1, None, Novelty::Old),
            (1, 3, Some(first), Novelty::New),
            // Another incarnation must echo the present challenge.
            (2, 1, None, Novelty::Unknown),
            (2, 1, Some(first), Novelty::Unknown),
            (2, 1, Some(second), Novelty::New),
            // The first incarnation is over: its requests are no longer accepted.
            (1, 4, Some(first), Novelty::Unknown),
            (1, 4, Some(second), Novelty::Unknown),
        ] {
            assert_eq!(judge(incarnation, number, echo).0, expected, "{incarnation} {number} {echo:?}");
        }
    }

    #[test]
    fn challenges_of_a_later_start_are_others() {
        let first = Freshness::new(&mut Challenges::new(77)).challenge;
        let mut challenges = Challenges::new(1 << 40);
        let mut known = Freshness::new(&mut challenges);
        let copy = known.judge(RequestId { incarnation: 1, number: 9 }, Some(first), &mut challenges);
        assert_eq!(copy, Novelty::Unknown);
    }
}
