//! Properties of a choice in any fleet.

use std::collections::BTreeSet;

use crate::common::{Member, TESSERA, add, chosen, chunks, fleet, request};
use proptest::prelude::*;
use refrain_route::{Router, Rule, WorkerId};

fn rules() -> impl Strategy<Value = Rule> {
    prop_oneof![Just(Rule::Cost), (0..3_u32).prop_map(|slack| Rule::Tessera { slack })]
}

/// Keys are few, so that workers share them.
fn keys(most: usize) -> impl Strategy<Value = Vec<u64>> {
    prop::collection::btree_set(0..24_u64, 0..most).prop_map(|keys| keys.into_iter().collect())
}

/// Workers, many of them equally loaded.
fn members() -> impl Strategy<Value = Vec<Member>> {
    let ids = prop::collection::btree_set(any::<u64>(), 1..12);
    let rest = prop::collection::vec((keys(12), 0..4_u32), 12);
    (ids, rest).prop_map(|(ids, rest)| {
        let members = ids.into_iter().zip(rest);
        members.map(|(id, (keys, waiting))| Member { id, keys, waiting }).collect()
    })
}

/// Sends some requests, and keeps their places.
fn booked(router: &mut Router, wanted: &[Vec<u64>]) -> Vec<refrain_route::Choice> {
    let choose = |keys: &Vec<u64>| router.choose(&request(&chunks(keys), &[]), 7);
    wanted.iter().filter_map(choose).collect()
}

proptest! {
    #[test]
    fn absent_and_excluded_workers_are_never_chosen(
        rule in rules(), members in members(), wanted in keys(8), out in any::<u64>(), gone in any::<u64>(), random in any::<u64>(),
    ) {
        let mut router = fleet(rule, &members);
        let is = |mask: u64, at: usize| mask >> (at % 64) & 1 == 1;
        let (mut absent, mut excluded) = (BTreeSet::new(), Vec::new());
        for (at, member) in members.iter().enumerate() {
            if is(gone, at) {
                router.remove(WorkerId(member.id));
                absent.insert(member.id);
            }
            if is(out, at) {
                excluded.push(WorkerId(member.id));
            }
        }
        let may = members.iter().any(|member| !absent.contains(&member.id) && !excluded.contains(&WorkerId(member.id)));
        match router.choose(&request(&chunks(&wanted), &excluded), random) {
            None => prop_assert!(!may, "somebody may be chosen"),
            Some(choice) => {
                prop_assert!(!absent.contains(&choice.worker.0) && !excluded.contains(&choice.worker));
                prop_assert!(members.iter().any(|member| member.id == choice.worker.0));
            }
        }
    }

    /// The chosen worker is chosen as well after it got more of the request's keys.
    #[test]
    fn a_worker_that_holds_more_is_not_chosen_less(
        rule in rules(), members in members(), wanted in keys(8), more in any::<u64>(), random in any::<u64>(),
    ) {
        let Some(before) = chosen(&mut fleet(rule, &members), &wanted, random) else { return Ok(()) };
        let mut richer = members.clone();
        let member = richer.iter_mut().find(|member| member.id == before).unwrap();
        member.keys.extend(wanted.iter().enumerate().filter(|(at, _)| more >> at & 1 == 1).map(|(_, key)| *key));
        prop_assert_eq!(chosen(&mut fleet(rule, &richer), &wanted, random), Some(before));
    }

    /// Of two workers with equal loads, the one that holds less of the request is never chosen.
    #[test]
    fn a_worker_that_holds_less_than_its_equal_is_not_chosen(
        rule in rules(), members in members(), wanted in keys(8), random in any::<u64>(), waiting in 0..3_u32,
    ) {
        prop_assume!(!wanted.is_empty());
        let mut members = members;
        let [poor, rich] = [u64::MAX - 1, u64::MAX];
        members.retain(|member| member.id < poor);
        members.push(Member { id: poor, keys: wanted[1..].to_vec(), waiting });
        members.push(Member { id: rich, keys: wanted.clone(), waiting });
        prop_assert_ne!(chosen(&mut fleet(rule, &members), &wanted, random), Some(poor));
    }

    #[test]
    fn the_order_of_workers_and_keys_does_not_matter(
        (members, shuffled) in members().prop_flat_map(|members| (Just(members.clone()), Just(members).prop_shuffle())),
        (wanted, mixed) in keys(8).prop_flat_map(|keys| (Just(keys.clone()), Just(keys).prop_shuffle())),
        rule in rules(), random in any::<u64>(), others in prop::collection::vec(keys(8), 0..6),
    ) {
        let mut router = fleet(rule, &members);
        let _held = booked(&mut router, &others);
        // A worker that left before the others came has given its place to one of them.
        let mut other = fleet(rule, &[Member { id: members[0].id ^ 1, keys: wanted.clone(), waiting: 0 }]);
        other.remove(WorkerId(members[0].id ^ 1));
        shuffled.iter().rev().for_each(|member| add(&mut other, member));
        let _held_too = booked(&mut other, &others);
        prop_assert_eq!(chosen(&mut router, &wanted, random), chosen(&mut other, &mixed, random));
    }

    #[test]
    fn a_seed_determines_every_choice(
        rule in rules(), members in members(), wanted in prop::collection::vec((keys(8), any::<u64>()), 1..20),
    ) {
        let run = || {
            let mut router = fleet(rule, &members);
            let choose = |(keys, random): &(Vec<u64>, u64)| router.choose(&request(&chunks(keys), &[]), *random);
            let choices: Vec<_> = wanted.iter().filter_map(choose).collect();
            choices.iter().map(|choice| choice.worker).collect::<Vec<_>>()
        };
        prop_assert_eq!(run(), run());
    }
}

fn idle(workers: u64) -> Vec<Member> {
    (0..workers).map(|id| Member { id, keys: Vec::new(), waiting: 0 }).collect()
}

/// Keys that nobody holds have a worker each; one that leaves moves its own keys and no others, evenly.
#[test]
fn a_worker_that_leaves_moves_its_own_keys_alone() {
    for rule in [Rule::Cost, TESSERA] {
        let mut router = fleet(rule, &idle(10));
        let homes = |router: &mut Router| -> Vec<u64> {
            (0..2000).map(|key| chosen(router, &[key * 7919, u64::MAX], key).unwrap()).collect()
        };
        let before = homes(&mut router);
        for worker in 0..10 {
            let keys = before.iter().filter(|home| **home == worker).count();
            assert!((140..260).contains(&keys), "worker {worker} is the home of {keys} of 2000 keys");
        }
        router.remove(WorkerId(3));
        let after = homes(&mut router);
        let moved: Vec<u64> = before.iter().zip(&after).filter(|(a, b)| a != b).map(|(a, _)| *a).collect();
        assert!(moved.iter().all(|home| *home == 3), "a key moved away from a worker that stayed");
        let heirs: BTreeSet<u64> =
            before.iter().zip(&after).filter(|(home, _)| **home == 3).map(|(_, heir)| *heir).collect();
        assert_eq!(heirs.len(), 9, "the keys of a worker that left go to all others");
    }
}

/// A worker that comes back is the home of the keys that it was the home of.
#[test]
fn a_worker_that_returns_has_its_keys_again() {
    let mut router = fleet(Rule::Cost, &idle(5));
    let homes = |router: &mut Router| (0..200).map(|key| chosen(router, &[key], 0)).collect::<Vec<_>>();
    let before = homes(&mut router);
    router.remove(WorkerId(2));
    assert_ne!(homes(&mut router), before);
    router.add(WorkerId(2)).unwrap();
    assert_eq!(homes(&mut router), before);
}

/// Holders of all keys that are equal in all else share the requests by chance.
#[test]
fn equal_holders_are_chosen_by_chance() {
    let member = |id| Member { id, keys: vec![5], waiting: 1 };
    for rule in [Rule::Cost, TESSERA] {
        let mut router = fleet(rule, &[member(1), member(2), member(3)]);
        let mut counts = [0; 3];
        (0..3000).for_each(|random| counts[chosen(&mut router, &[5], random).unwrap() as usize - 1] += 1);
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }
}
