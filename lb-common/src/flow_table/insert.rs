use super::{
    Control, Evict, EvictionClass, OverflowInsert, PLACES, Places,
    control::State,
    memory::{Memory, Overflow},
};

/// The result of [`insert_new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Insert<S> {
    /// The entry is in this slot.
    Inserted(S),
    /// The entry is in the overflow.
    Overflowed,
    /// The key has an entry, another insert of the same key is about to create one, or another CPU has already removed
    /// the new entry.
    Exists,
    /// Neither the table nor the overflow has room.
    Full,
}

/// Maximum number of attempts at a slot: an attempt fails if the slot changes meanwhile.
pub(super) const ATTEMPTS: u32 = 3;

/// Inserts an entry if its key is new: into a free place, else into a place from which it evicts another entry, else
/// into the overflow. If several CPUs insert the same key at once, at most one succeeds.
pub fn insert_new<M: Overflow>(
    table: &M,
    evict: &mut impl Evict<M>,
    places: &Places,
    key: &M::Key,
    value: &M::Value,
) -> Insert<M::Slot> {
    insert_free(table, places, key, value).unwrap_or_else(|| {
        make_room(table, evict, places);
        insert_free(table, places, key, value)
            .unwrap_or_else(|| insert_into_overflow(table, places, key, value))
    })
}

/// The first part of [`insert_new`], which evicts nothing: `None` if no place is free.
#[inline(always)]
pub fn insert_free<M: Overflow>(
    table: &M,
    places: &Places,
    key: &M::Key,
    value: &M::Value,
) -> Option<Insert<M::Slot>> {
    if has_entry(table, places, key) {
        return Some(Insert::Exists);
    }
    if table.takes_all() {
        return Some(insert_into_overflow(table, places, key, value));
    }
    let claim = claim_free(table, places)?;
    table.write_key(claim.slot, key);
    table.write_value(claim.slot, value);
    let is_new = publish(table, places, key, &claim);
    Some(if is_new { Insert::Inserted(claim.slot) } else { Insert::Exists })
}

/// The second part of [`insert_new`]: evicts an expired entry from one of the places, or, if no place has an expired
/// entry, an unproven entry. Does nothing if no place has either.
#[inline(always)]
pub fn make_room<M: Memory>(table: &M, evict: &mut impl Evict<M>, places: &Places) {
    // (One loop for both passes over the places: of two nested loops, LLVM would unroll the outer one.)
    for turn in 0..2 * PLACES {
        let wanted = if turn < PLACES { EvictionClass::Expired } else { EvictionClass::Unproven };
        let place = turn % PLACES;
        let Some(slot) = table.slot(places.slot(place)) else { return };
        let control = table.control(slot);
        if control.is_live()
            && evict.class(table.acquire(slot, control)) == wanted
            && let Some(claim) = Claim::make(table, place, slot, control)
        {
            evict.evicted(slot);
            table.set(slot, claim.control.freed());
            return;
        }
    }
}

#[inline(always)]
fn has_entry<M: Memory>(table: &M, places: &Places, key: &M::Key) -> bool {
    for place in 0..PLACES {
        let Some(slot) = table.slot(places.slot(place)) else { break };
        let control = table.control(slot);
        if control == Control::NEVER_USED {
            break;
        }
        if is_entry(table, slot, control, places, key) {
            return true;
        }
    }
    false
}

/// Whether the slot, whose control word was just loaded, holds an entry with this key.
#[inline(always)]
fn is_entry<M: Memory>(table: &M, slot: M::Slot, control: Control, places: &Places, key: &M::Key) -> bool {
    control.has_fingerprint(places.fingerprint())
        && matches!(control.state(), State::Live | State::Changing)
        && table.has_key(table.acquire(slot, control), key)
        && table.control_after(slot) == control
}

/// A slot that this insert has claimed.
struct Claim<S> {
    place: u32,
    slot: S,
    control: Control,
}

impl<S: Copy> Claim<S> {
    /// Claims the slot of a place if its control word still is `seen`.
    #[inline(always)]
    fn make<M: Memory<Slot = S>>(table: &M, place: u32, slot: S, seen: Control) -> Option<Self> {
        let control = seen.claimed(M::IS_AGENT);
        table.compare_exchange(slot, seen, control).then_some(Self { place, slot, control })
    }
}

/// Claims the first free place.
#[inline(always)]
fn claim_free<M: Memory>(table: &M, places: &Places) -> Option<Claim<M::Slot>> {
    for place in 0..PLACES {
        let slot = table.slot(places.slot(place))?;
        let control = table.control(slot);
        if control.is_free()
            && let Some(claim) = Claim::make(table, place, slot, control)
        {
            return Some(claim);
        }
    }
    None
}

/// Makes the complete slot a live entry, unless another place or the overflow has the key. Returns whether the slot now
/// holds a live entry; if not, the slot is free.
#[inline(always)]
fn publish<M: Overflow>(table: &M, places: &Places, key: &M::Key, claim: &Claim<M::Slot>) -> bool {
    let tentative = claim.control.tentative(places.fingerprint());
    table.set(claim.slot, tentative);
    let wins = win_all_places(table, places, key, Some(claim.place))
        && !(table.count() != 0 && table.has(key))
        && table.compare_exchange(claim.slot, tentative, tentative.live());
    if !wins {
        // Another insert may have killed the entry, but leaves the slot to its owner.
        table.set(claim.slot, tentative.freed());
    }
    wins
}

/// The last part of [`insert_new`]: inserts into the overflow. A tentative entry with the same key in a slot gives way
/// to this insert, unless a program inserts that entry and this insert is the agent's.
#[inline(always)]
pub fn insert_into_overflow<M: Overflow>(
    table: &M,
    places: &Places,
    key: &M::Key,
    value: &M::Value,
) -> Insert<M::Slot> {
    // Counts the entry before inserting it: then either another insert of the key reads this count, or this insert
    // finds the entry of the other insert below.
    table.add_to_count(1);
    let result = match table.insert(key, value) {
        OverflowInsert::Inserted if win_all_places(table, places, key, None) => return Insert::Overflowed,
        OverflowInsert::Inserted if table.remove(key) => Insert::Exists,
        // Another CPU has removed the entry, and has decremented the number of entries.
        OverflowInsert::Inserted => return Insert::Exists,
        OverflowInsert::Exists => Insert::Exists,
        OverflowInsert::Full => Insert::Full,
    };
    table.add_to_count(-1);
    result
}

/// Whether no other place has an entry with this key. Kills tentative entries that [give way](gives_way) to this
/// insert. `own` is the place of this insert; `None` is the overflow.
#[inline(always)]
fn win_all_places<M: Memory>(table: &M, places: &Places, key: &M::Key, own: Option<u32>) -> bool {
    for place in 0..PLACES {
        if own == Some(place) {
            continue;
        }
        let Some(slot) = table.slot(places.slot(place)) else { break };
        let control = table.control(slot);
        if control == Control::NEVER_USED {
            break;
        }
        if control.has_fingerprint(places.fingerprint())
            && !table.win_place(slot, places, key, own.is_none_or(|own| own < place))
        {
            return false;
        }
    }
    true
}

/// Whether this place, whose slot has the fingerprint of the key, has no entry with the key. Kills a tentative entry
/// that gives way to this insert. `comes_first` is whether the place of this insert comes before the place of that
/// entry. Returns `false` if the slot changes during each of three attempts.
#[inline(always)]
pub fn win_place<M: Memory>(
    table: &M,
    slot: M::Slot,
    places: &Places,
    key: &M::Key,
    comes_first: bool,
) -> bool {
    for _ in 0..ATTEMPTS {
        let control = table.control(slot);
        if !control.has_fingerprint(places.fingerprint())
            || control.state() == State::Empty
            || !table.has_key(table.acquire(slot, control), key)
        {
            return true;
        }
        let is_ours = control.state() == State::Tentative && gives_way::<M>(control, comes_first);
        if is_ours && table.compare_exchange(slot, control, control.killed()) {
            return true;
        }
        if !is_ours && table.control_after(slot) == control {
            return false;
        }
    }
    false
}

/// Whether another tentative entry of the same key gives way to the entry of this insert. An agent's entry gives way to
/// a program's entry, because the agent may have been killed; otherwise the entry in the later place gives way.
#[inline(always)]
const fn gives_way<M: Memory>(other: Control, comes_first: bool) -> bool {
    if other.is_agents() == M::IS_AGENT { comes_first } else { other.is_agents() }
}
