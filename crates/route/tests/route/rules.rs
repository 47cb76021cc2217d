//! The rules and the load, case by case.

use crate::common::{Member, RATES, TESSERA, chosen, chunks, first_state, fleet, request, router};
use refrain_route::{Load, Rates, Request, Router, Rule, State, Update, WorkerId};

fn member(id: u64, keys: &[u64], waiting: u32) -> Member {
    Member { id, keys: keys.to_vec(), waiting }
}

/// Seconds of a fetch and of a prefill of a chunk, and of computing a request of two chunks.
const FETCH: f64 = 0.03 + 512.0 * 23_040.0 / 1e8;
const COMPUTE: f64 = (90.0 + 0.15 * 1024.0) / 3000.0;

#[test]
fn cost_weighs_the_queue_against_what_is_missing() {
    // Two missing chunks take 266 ms in place of 81; a request ahead takes 200.
    for (ahead, expected) in [(0, 1), (1, 2)] {
        let mut router = fleet(Rule::Cost, &[member(1, &[5, 6], ahead), member(2, &[], 0)]);
        assert_eq!(chosen(&mut router, &[5, 6], 0), Some(expected), "{ahead} requests ahead");
    }
    // One that has half of it is as good as one that has all, if it has less to do.
    let mut router = fleet(Rule::Cost, &[member(1, &[5, 6], 1), member(2, &[5], 0), member(3, &[], 0)]);
    assert_eq!(chosen(&mut router, &[5, 6], 0), Some(2));
}

#[test]
fn cost_takes_the_least_work_where_all_have_a_queue() {
    // Fetching takes 185 ms more, and waiting for one request more takes 200: with an idle worker in the fleet that decides.
    let ask = |members: &[Member]| chosen(&mut fleet(Rule::Cost, members), &[5, 6], 0);
    assert_eq!(ask(&[member(1, &[5, 6], 1), member(2, &[], 0)]), Some(2));
    // Where all have requests waiting, the 185 ms count for those as well.
    assert_eq!(ask(&[member(1, &[5, 6], 4), member(2, &[], 3)]), Some(1));
}

#[test]
fn an_estimate_says_what_a_choice_was_made_by() {
    let mut router = fleet(Rule::Cost, &[member(1, &[5], 2)]);
    let choice = router.choose(&request(&chunks(&[5, 6]), &[]), 0).unwrap();
    assert_eq!((choice.estimate.held, choice.estimate.missing), (512, 512));
    assert!((choice.estimate.wait - 2.0 * RATES.service).abs() < 1e-9);
    let work = (FETCH + 512.0 * 23_040.0 / 2e9).max(COMPUTE);
    assert!((choice.estimate.work - work).abs() < 1e-9, "{:?}", choice.estimate);
    assert!((choice.estimate.ttft() - 0.4 - work).abs() < 1e-9);
}

#[test]
fn cost_knows_that_machines_differ() {
    for (quick, slow) in [(1, 2), (2, 1)] {
        let mut router = fleet(Rule::Cost, &[member(1, &[], 0), member(2, &[], 0)]);
        for (worker, prefill) in [(quick, 6000.0), (slow, 3000.0)] {
            let rates = Rates { prefill, remote: 1e6, ..RATES };
            let state = State { seq: 2, rates, ..first_state(&[], 0) };
            assert_eq!(router.state(WorkerId(worker), &state), Update::Applied);
        }
        assert_eq!(chosen(&mut router, &[5, 6], 0), Some(quick));
    }
}

#[test]
fn tessera_takes_the_fullest_holder_within_its_slack() {
    let members = [member(1, &[5, 6, 7], 2), member(2, &[5, 6], 1), member(3, &[5], 0), member(4, &[], 0)];
    for (slack, expected) in [(0, 3), (1, 2), (2, 1)] {
        let mut router = fleet(Rule::Tessera { slack }, &members);
        assert_eq!(chosen(&mut router, &[5, 6, 7], 0), Some(expected), "slack {slack}");
    }
    // Tokens count, and not chunks.
    let mut router = fleet(TESSERA, &[member(1, &[5, 6], 0), member(2, &[7], 0)]);
    let mut asked = chunks(&[5, 6, 7]);
    asked[2].tokens = 1025;
    assert_eq!(router.choose(&request(&asked, &[]), 0).unwrap().worker, WorkerId(2));
    // Of equal holders the less loaded one.
    let mut router = fleet(TESSERA, &[member(1, &[5], 1), member(2, &[5], 0)]);
    assert!((0..20).all(|random| chosen(&mut router, &[5], random) == Some(2)));
}

/// Where nobody holds a key, its home is taken even with as many requests as the slack allows, and never with more.
#[test]
fn tessera_goes_to_the_home_of_a_key_within_its_slack() {
    let ask = |waiting: [u32; 4]| {
        let members: Vec<Member> = (0..4).map(|id| member(id, &[], waiting[id as usize])).collect();
        chosen(&mut fleet(TESSERA, &members), &[50], 0).unwrap() as usize
    };
    let home = ask([0; 4]);
    let with = |load| {
        let mut waiting = [0; 4];
        waiting[home] = load;
        ask(waiting)
    };
    assert_eq!(with(1), home);
    assert_ne!(with(2), home);
}

/// Requests that miss the same chunk meet, however many wait elsewhere: the index learns of the chunk a while later.
#[test]
fn equal_misses_meet_at_one_worker() {
    for rule in [Rule::Cost, TESSERA] {
        let members: Vec<Member> = (0..20).map(|id| member(id, &[1], 0)).collect();
        let mut router = fleet(rule, &members);
        let home = chosen(&mut router, &[1, 50], 0).unwrap();
        for random in 0..20 {
            assert_eq!(
                chosen(&mut router, &[1, 50], random),
                Some(home),
                "what is held by all decides nothing"
            );
            assert_eq!(
                chosen(&mut router, &[60, 50], random),
                Some(home),
                "the smallest missing key decides"
            );
        }
    }
}

#[test]
fn a_booking_counts_until_it_is_dropped() {
    let mut router = fleet(Rule::Cost, &[member(1, &[5], 0)]);
    let load = |router: &Router| router.load(WorkerId(1)).unwrap();
    let asked = chunks(&[5]);
    let mut first = router.choose(&request(&asked, &[]), 0).unwrap();
    let second = router.choose(&request(&asked, &[]), 0).unwrap();
    assert_eq!(load(&router), Load { running: 0, waiting: 2 });
    assert!((second.estimate.wait - first.estimate.work).abs() < 1e-5, "the second waits for the first");
    first.booking.first_token();
    first.booking.first_token();
    assert_eq!(load(&router), Load { running: 1, waiting: 1 });
    let third = router.book(WorkerId(1), &request(&asked, &[])).unwrap();
    assert!(
        (third.estimate.wait - second.estimate.work).abs() < 1e-5,
        "what is decoded keeps nobody waiting"
    );
    drop(first);
    drop(second);
    drop(third);
    assert_eq!(load(&router), Load::default());
    assert_eq!(router.choose(&request(&asked, &[]), 0).unwrap().estimate.wait, 0.0);
}

#[test]
fn booked_work_passes_with_the_time() {
    let mut router = fleet(Rule::Cost, &[member(1, &[5], 0)]);
    let asked = chunks(&[5]);
    let at = |now| Request { now, ..request(&asked, &[]) };
    let first = router.choose(&at(100.0), 0).unwrap();
    let work = first.estimate.work;
    let wait = |router: &mut Router, now| router.choose(&at(now), 0).unwrap().estimate.wait;
    let near =
        |value: f64, expected: f64| assert!((value - expected).abs() < 1e-5, "{value}, not {expected}");
    near(wait(&mut router, 100.0), work);
    near(wait(&mut router, 100.0 + work / 4.0), work * 0.75);
    near(wait(&mut router, 200.0), 0.0);
    // Two that are late: one of them may be at its end, the other has not begun.
    let second = router.choose(&at(100.0), 0).unwrap();
    near(wait(&mut router, 200.0), work);
    // The first ends early: no more than the second is left.
    drop(first);
    near(wait(&mut router, 100.0), work);
    drop(second);
    near(wait(&mut router, 100.0), 0.0);
}

#[test]
fn requests_of_other_gateways_count_once() {
    let mut router = fleet(TESSERA, &[member(1, &[], 0)]);
    let asked = chunks(&[5]);
    let mut held: Vec<_> = (0..3).map(|_| router.choose(&request(&asked, &[]), 0).unwrap()).collect();
    let report = |router: &mut Router, seq, load, own| {
        let state = State { seq, load, own, ..first_state(&[], 0) };
        assert_eq!(router.state(WorkerId(1), &state), Update::Applied);
        router.load(WorkerId(1)).unwrap()
    };
    let load = |running, waiting| Load { running, waiting };
    // The three of this gateway are among the five.
    assert_eq!(report(&mut router, 2, load(1, 5), None), load(1, 5));
    held.truncate(1);
    assert_eq!(router.load(WorkerId(1)), Some(load(1, 3)), "two of the own are gone");
    // A late report that still has all three says so.
    assert_eq!(report(&mut router, 3, load(1, 5), Some(load(0, 3))), load(1, 3));
    // Without that, the two that are gone would be taken for those of others.
    assert_eq!(report(&mut router, 4, load(1, 5), None), load(1, 5));
    // A report that does not have the own ones yet takes none of them away.
    assert_eq!(report(&mut router, 5, load(0, 0), None), load(0, 1));
    // One that was overtaken says nothing.
    let late = State { seq: 4, load: load(7, 7), ..first_state(&[], 0) };
    assert_eq!(router.state(WorkerId(1), &late), Update::Stale);
    assert_eq!(router.load(WorkerId(1)), Some(load(0, 1)));
}

/// An answer that comes whole has no first token at the gateway.
#[test]
fn whole_answers_that_are_decoded_do_not_wait() {
    let mut router = fleet(Rule::Cost, &[member(1, &[5], 0)]);
    let asked = chunks(&[5]);
    let at = |now| Request { now, ..request(&asked, &[]) };
    let mut held: Vec<_> = (0..8).map(|_| router.choose(&at(0.0), 0).unwrap()).collect();
    let work = held[0].estimate.work;
    let report = |router: &mut Router, seq, running, waiting| {
        let state = State { seq, load: Load { running, waiting }, ..first_state(&[], 0) };
        assert_eq!(router.state(WorkerId(1), &state), Update::Applied);
        router.load(WorkerId(1)).unwrap()
    };
    let nothing = Request { question: 0, now: 100.0, ..request(&[], &[]) };
    let wait = |router: &mut Router| router.choose(&nothing, 0).unwrap().estimate.wait;
    assert_eq!(report(&mut router, 2, 6, 2), Load { running: 6, waiting: 2 });
    assert!((wait(&mut router) - work).abs() < 1e-5, "of the two that wait, one may be at its end");
    assert_eq!(report(&mut router, 3, 8, 0), Load { running: 8, waiting: 0 });
    assert_eq!(wait(&mut router), 0.0);
    // Beside two requests of another gateway.
    assert_eq!(report(&mut router, 4, 10, 0), Load { running: 10, waiting: 0 });
    // One that comes waits for nobody, and its time is not that of those which end.
    let last = router.choose(&at(100.0), 0).unwrap();
    held.truncate(3);
    assert_eq!(router.load(WorkerId(1)), Some(Load { running: 5, waiting: 1 }));
    assert!((wait(&mut router) - last.estimate.work).abs() < 1e-5);
    drop(held);
    drop(last);
    assert_eq!(router.load(WorkerId(1)), Some(Load { running: 2, waiting: 0 }));
}

#[test]
fn a_worker_that_joins_is_rated_like_those_that_have_measured() {
    let mut router = fleet(Rule::Cost, &[member(1, &[], 0), member(2, &[], 0), member(3, &[], 0)]);
    for (worker, prefill) in [(1, 400.0), (2, 600.0)] {
        let state = State { seq: 2, rates: Rates { prefill, ..RATES }, ..first_state(&[], 0) };
        assert_eq!(router.state(WorkerId(worker), &state), Update::Applied);
    }
    let question = Request { question: 500, ..request(&[], &[]) };
    for (worker, seconds) in [(3, 500.0 / 3000.0), (4, 1.0)] {
        let _ = router.add(WorkerId(worker));
        let estimate = router.book(WorkerId(worker), &question).unwrap().estimate;
        assert!((estimate.work - seconds).abs() < 1e-9, "{worker}: {estimate:?}");
    }
}

#[test]
fn a_removed_worker_leaves_nothing_behind() {
    let mut router = fleet(Rule::Cost, &[member(1, &[5, 6], 3), member(2, &[6], 0)]);
    let booking = router.book(WorkerId(1), &request(&chunks(&[5]), &[])).unwrap();
    assert!(router.remove(WorkerId(1)));
    assert!(!router.remove(WorkerId(1)));
    assert_eq!((router.pairs(), router.distinct_keys()), (1, 1));
    assert_eq!(router.holders(5).count(), 0);
    assert_eq!(router.holders(6).collect::<Vec<_>>(), [WorkerId(2)]);
    assert_eq!((router.load(WorkerId(1)), router.keys(WorkerId(1)).count()), (None, 0));
    assert!(router.book(WorkerId(1), &request(&chunks(&[5]), &[])).is_none());
    // States of it that come late do not bring it back.
    assert_eq!(router.state(WorkerId(1), &first_state(&[5], 9)), Update::UnknownWorker);
    assert_eq!(router.pairs(), 1);
    // Another worker in its place, or itself once more, begins with nothing.
    assert_eq!(router.add(WorkerId(1)), Ok(true));
    assert_eq!(router.add(WorkerId(1)), Ok(false));
    assert_eq!(router.load(WorkerId(1)), Some(Load::default()));
    drop(booking);
    assert_eq!(router.load(WorkerId(1)), Some(Load::default()));
}

#[test]
fn figures_that_say_nothing_change_nothing() {
    let mut router = fleet(Rule::Cost, &[member(1, &[], 0)]);
    let before = router.choose(&request(&chunks(&[5]), &[]), 0).unwrap().estimate;
    let rates =
        Rates { prefill: 0.0, local: f64::NAN, remote: -1.0, remote_latency: f64::INFINITY, service: 0.0 };
    let state = State { seq: 2, rates, ..first_state(&[], 0) };
    assert_eq!(router.state(WorkerId(1), &state), Update::Applied);
    assert_eq!(router.choose(&request(&chunks(&[5]), &[]), 0).unwrap().estimate, before);
}

#[test]
fn an_empty_fleet_has_no_choice_and_a_full_one_no_room() {
    let mut router = router(TESSERA);
    assert!(router.choose(&request(&chunks(&[5]), &[]), 0).is_none());
    (0..65_536).for_each(|id| assert_eq!(router.add(WorkerId(id)), Ok(true)));
    assert!(router.add(WorkerId(65_536)).unwrap_err().to_string().contains("65,536"));
    assert!(router.remove(WorkerId(9)));
    assert_eq!(router.add(WorkerId(65_536)), Ok(true));
    assert_eq!(router.loads().count(), 65_536);
}
