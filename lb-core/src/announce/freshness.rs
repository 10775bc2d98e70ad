//! Distinguishes a new question from a copy of an earlier one, which an attacker without the key may have recorded.
//!
//! A question has a random number that its sender chose at its start (its *incarnation*), and a number that grows with
//! each question since then. A receiver accepts a question of the incarnation that it knows if the question's number is
//! greater than those of all earlier questions. It accepts another incarnation only if the question echoes the
//! receiver's *challenge*. The receiver gives the challenge in an answer, and replaces it as soon as a question has
//! echoed it. So the receiver accepts no question from before its own start, and none of an incarnation that it has
//! since replaced by another.

use serde::{Deserialize, Serialize};

/// Identifies a question among all questions that a member has ever sent, including those before its last start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuestionId {
    /// A random number that the member chose at its start.
    pub incarnation: u64,
    /// A number that grows with each question since the start.
    pub number: u64,
}

/// A number that a member must echo before another member accepts questions of its incarnation.
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

/// What a member knows about the questions of one other member.
#[derive(Clone, Copy, Debug)]
pub(super) struct Freshness {
    /// The last question that this member accepted.
    last: Option<QuestionId>,
    /// The challenge that the next incarnation of the other member must echo.
    pub(super) challenge: Challenge,
}

/// Whether a question is new, or a copy of an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Novelty {
    /// The question is new.
    New,
    /// The question is a copy, or a later question has overtaken it.
    Old,
    /// The question is from an unknown incarnation, whose member must echo the challenge first.
    Unknown,
}

impl Freshness {
    pub(super) const fn new(challenges: &mut Challenges) -> Self {
        Self { last: None, challenge: challenges.give() }
    }

    /// Decides whether a question is new; a new one becomes the last accepted one.
    pub(super) fn judge(
        &mut self,
        id: QuestionId,
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
    fn copies_of_no_question_are_accepted() {
        let mut challenges = Challenges::new(77);
        let mut known = Freshness::new(&mut challenges);
        let mut judge = |incarnation, number, echo| {
            let verdict = known.judge(QuestionId { incarnation, number }, echo, &mut challenges);
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
            // The first incarnation is over: its questions are no longer accepted.
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
        let copy = known.judge(QuestionId { incarnation: 1, number: 9 }, Some(first), &mut challenges);
        assert_eq!(copy, Novelty::Unknown);
    }
}
