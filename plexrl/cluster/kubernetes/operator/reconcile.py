"""Brings one RLJob nearer to its spec; every step may be repeated.

1. An RLJob being deleted: cancel its PlexRL job, delete its Job, remove the finalizer.
2. Without the finalizer: add it, before anything is made that it has to clean up.
3. Without a Job: create it. A Job that exists already is one that an earlier try made.
4. A changed `suspend` goes to the Job, unless Kueue owns it.
5. A failed controller's PlexRL job is cancelled, so that its GPUs are free at once.
6. The status follows.
"""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING

from plexrl.cluster.kubernetes.api import TIMEOUT_S, KubeObject, has_status
from plexrl.cluster.kubernetes.operator.jobs import FINAL, JobsOfCluster
from plexrl.cluster.kubernetes.operator.manifest import (
    FINALIZER,
    GROUP,
    PLURAL,
    VERSION,
    is_owned,
    is_queued,
    job_id,
    job_manifest,
)
from plexrl.cluster.kubernetes.operator.status import Phase, Seen, status_of
from plexrl.errors import PlexRLError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

LOG = logging.getLogger(__name__)
_WHERE = (GROUP, VERSION)


class Reconciler:
    """Works on RLJobs, one at a time."""

    def __init__(
        self,
        api: "ApiClient",
        jobs: JobsOfCluster,
        *,
        url: str,
        image: str,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`url` and `image` are as for `job_manifest`."""
        from kubernetes.client import BatchV1Api, CustomObjectsApi

        self._batch = BatchV1Api(api)
        self._objects = CustomObjectsApi(api)
        self._jobs, self._url, self._image, self._clock = jobs, url, image, clock

    def reconcile(self, rljob: KubeObject, job: KubeObject | None) -> None:
        """One step for an RLJob and the Job of its name, as last seen.

        Raises:
            ApiException: the API server refuses; with 409 what was seen is out of date.
            PlexRLError: a job could not be cancelled.
        """
        if rljob["metadata"].get("deletionTimestamp"):
            self._clean_up(rljob, job)
            return
        if FINALIZER not in (rljob["metadata"].get("finalizers") or ()):
            finalizers = [*(rljob["metadata"].get("finalizers") or ()), FINALIZER]
            rljob = self._patch(rljob, {"metadata": {"finalizers": finalizers}})
        is_final = Phase((rljob.get("status") or {}).get("phase", Phase.PENDING)).is_final
        if job is None and not is_final:
            job = self._create(rljob)
        elif job is not None and not is_final and is_owned(job, rljob):
            self._follow_suspend(rljob, job)
        seen = self._seen(rljob, job, is_final=is_final)
        status = status_of(rljob, seen, self._clock().strftime("%Y-%m-%dT%H:%M:%SZ"))
        if status["phase"] == Phase.FAILED and seen.view is not None and seen.view.is_live:
            self._jobs.cancel(job_id(rljob), "its controller failed")
        if status != rljob.get("status"):
            self._objects.patch_namespaced_custom_object_status(
                *_WHERE,
                rljob["metadata"]["namespace"],
                PLURAL,
                rljob["metadata"]["name"],
                # A merge patch keeps fields that the new status lacks; none is ever removed.
                {"metadata": _version(rljob), "status": status},
                _request_timeout=TIMEOUT_S,
            )

    def _seen(self, rljob: KubeObject, job: KubeObject | None, *, is_final: bool) -> Seen:
        if is_final and rljob["status"].get("jobState") in FINAL:
            # Nothing about it changes any more.
            return Seen(job, None)
        try:
            return Seen(job, self._jobs.view(job_id(rljob)))
        except PlexRLError as error:
            return Seen(job, None, f"PlexRL could not be asked: {error.code}")

    def _create(self, rljob: KubeObject) -> KubeObject | None:
        from kubernetes.client import ApiException

        manifest = job_manifest(rljob, url=self._url, image=self._image)
        namespace = rljob["metadata"]["namespace"]
        try:
            made = self._batch.create_namespaced_job(
                namespace, manifest, _request_timeout=TIMEOUT_S
            )
        except ApiException as error:
            if has_status(error, HTTPStatus.CONFLICT):
                # Seen in a moment by the watch; until then nothing is known about it.
                return None
            raise
        LOG.info("created the Job %s/%s", namespace, manifest["metadata"]["name"])
        found: KubeObject = self._batch.api_client.sanitize_for_serialization(made)
        return found

    def _follow_suspend(self, rljob: KubeObject, job: KubeObject) -> None:
        wanted = bool(rljob["spec"].get("suspend", False))
        if is_queued(rljob) or bool(job["spec"].get("suspend", False)) == wanted:
            return
        self._batch.patch_namespaced_job(
            job["metadata"]["name"],
            job["metadata"]["namespace"],
            {"metadata": _version(job), "spec": {"suspend": wanted}},
            _request_timeout=TIMEOUT_S,
        )

    def _clean_up(self, rljob: KubeObject, job: KubeObject | None) -> None:
        from kubernetes.client import ApiException

        finalizers = list(rljob["metadata"].get("finalizers") or ())
        if FINALIZER not in finalizers:
            return
        if job is not None and is_owned(job, rljob):
            try:
                # The controller first, which would create its job again.
                self._batch.delete_namespaced_job(
                    job["metadata"]["name"],
                    job["metadata"]["namespace"],
                    propagation_policy="Background",
                    _request_timeout=TIMEOUT_S,
                )
            except ApiException as error:
                if not has_status(error, HTTPStatus.NOT_FOUND):
                    raise
        self._jobs.cancel(job_id(rljob), "its RLJob was deleted")
        finalizers.remove(FINALIZER)
        self._patch(rljob, {"metadata": {"finalizers": finalizers}})

    def _patch(self, rljob: KubeObject, body: KubeObject) -> KubeObject:
        body["metadata"].update(_version(rljob))
        metadata = rljob["metadata"]
        found: KubeObject = self._objects.patch_namespaced_custom_object(
            *_WHERE,
            metadata["namespace"],
            PLURAL,
            metadata["name"],
            body,
            _request_timeout=TIMEOUT_S,
        )
        return found


def _version(found: KubeObject) -> KubeObject:
    """Refuses the patch with 409 if the object has changed since it was seen."""
    return {"resourceVersion": found["metadata"]["resourceVersion"]}
