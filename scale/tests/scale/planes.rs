//! The tests that hold on every plane: by a list of addresses, and on Dynamo's runtime with discovery by files.

/// Makes a module of tests for each plane.
macro_rules! on_every_plane {
    ($($(#[$attribute:meta])* $file:ident::$test:ident,)*) => {
        mod listed {
            $(
                $(#[$attribute])*
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    crate::$file::$test(&crate::harness::Plane::List).await;
                }
            )*
        }

        #[cfg(feature = "dynamo")]
        mod discovered {
            $(
                $(#[$attribute])*
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    let folder = tempfile::tempdir().unwrap();
                    crate::$file::$test(&crate::harness::by_file(folder.path())).await;
                }
            )*
        }
    };
}

on_every_plane! {
    answers::every_worker_gives_the_same_answers,
    failures::a_worker_that_hangs_holds_up_no_request,
    failures::killed_workers_lose_no_answer,
    failures::no_worker_of_other_numerics_goes_on_with_a_stream,
    failures::workers_that_stop_finish_what_they_have,
    sharing::a_late_gateway_knows_what_the_first_knows,
    sharing::each_chunk_is_stored_once,
    #[ignore = "measures throughput, for a minute: make scale-test runs it"]
    sharing::throughput_grows_with_workers,
    tenancy::tenants_see_their_own_documents,
    upgrade::workers_are_upgraded_one_by_one,
}
